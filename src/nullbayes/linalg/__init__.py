"""Matrices that multiply, and what is computed from products alone. No networks, no derivatives."""
