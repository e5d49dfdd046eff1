"""Times that programs would take on chips that are not here, from compiled text and shapes: never from a model.

`schedule` and `timeline` are for programs that were compiled for TPUs; the other files are a discrete-event model of Neuron
chips (it needs the `neuron` extra, SimPy), programs for it, and plans.
"""
