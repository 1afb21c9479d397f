"""2-D convolution algorithms in torch operations, and the shape arithmetic that all backends share."""
