"""The engine while it trains."""
