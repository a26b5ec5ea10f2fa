"""What an optimizer's class does, found without the engine: its kind, facts from trial steps, and steps over blocks."""
