"""Triton kernels of the experts. Importing a module of this package imports triton, which CPU
installs lack: `moed.moe.experts` does so only when such a kernel was chosen.
"""
