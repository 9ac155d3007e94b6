"""`moed doctor`: what on this machine would break a launch, each with its fix."""
