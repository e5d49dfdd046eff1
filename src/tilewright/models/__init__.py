"""The maths of each model family, free of parallelism, and its checkpoint mapping."""
