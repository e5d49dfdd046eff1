"""A discrete-event model of a Neuron chip and its links, programs for it, and a planner. Needs the `neuron` extra (SimPy)."""
