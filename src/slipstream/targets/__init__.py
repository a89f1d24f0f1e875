"""What runs a model: the protocol and its runtimes."""
