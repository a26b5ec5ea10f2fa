"""Facts about an optimizer's class, found without the engine: its kind, facts from trial steps, and steps over blocks."""
