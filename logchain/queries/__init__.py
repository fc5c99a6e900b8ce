"""What is computed of a batch of chains, whatever their transition: by kernels where there are some, or by the scan."""
