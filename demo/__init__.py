"""The demonstration: two models, real scanned digits, and the programs that made and show them."""
