"""Config-driven PyTorch training experiments that run unchanged on one device and on many machines."""

__version__ = "0.2.0"
