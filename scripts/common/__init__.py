"""Shared by the scripts: command lines, data, models, metrics, and one training run."""
