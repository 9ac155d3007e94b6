"""The request bodies of all routes, with the limits that need nothing but the body itself."""
