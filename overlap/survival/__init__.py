"""Agreement of surviving processes on the next world."""
