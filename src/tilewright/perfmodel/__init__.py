"""Performance models: predicted times of programs on absent chips, from compiled text and shapes.

`schedule` and `timeline` model programs compiled for TPUs. The other modules are a discrete-event model of Neuron chips (needs
the `neuron` extra, SimPy), programs for it, and plans.
"""
