"""What spans processes: communicators whose ranks live in several of them, and what those tell each other."""
