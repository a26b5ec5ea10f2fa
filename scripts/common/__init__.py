"""What the scripts share: command lines, data, models, metrics, and one training run."""
