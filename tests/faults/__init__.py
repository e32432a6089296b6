"""Real jobs that are hit: who is blamed, with which exit code, how soon, and that nothing is left."""
