"""One file for each framework; each declares its adapter as `FRAMEWORK`."""
