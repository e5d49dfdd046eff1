"""Reading memory alone, a bound on the speed of kernels that stream weights."""
