"""One module per page; each adds its components and listeners to the Blocks it is called in."""
