"""The package's version, alone in a file so that builds can read it without importing torch."""

__version__ = "0.1.0.dev0"
