"""Small models made by script, with seeded random weights; each function writes one version folder's artifact."""
