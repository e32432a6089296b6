"""Worlds on engines that place processes: Ray and Dask, for real."""
