"""The benchmark harness and each benchmark."""
