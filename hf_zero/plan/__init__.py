"""Predicted and measured bytes and seconds of a run."""
