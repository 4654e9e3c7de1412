"""One device among many: who it is, what it tells of itself, and what is published for those who only listen."""
