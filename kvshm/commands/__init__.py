"""Commands of the command line that stand on no subsystem of their own."""
