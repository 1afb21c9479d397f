"""2-D convolution algorithms in torch operations, and shape arithmetic for all backends."""
