"""Work common to all routes, as pure ASGI middleware: one class per file."""
