"""Foundations without values or processes: layout, units, dtypes, lazy gradients, patches of instances."""
