"""Kernels of other models with recurrent states: imported on CPUs, and not called by LFM2."""

from sgl_kernel import __getattr__ as __getattr__
