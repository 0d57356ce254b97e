"""The file formats of weights (whole, adapter, delta), and the checks of a folder before it is loaded."""
