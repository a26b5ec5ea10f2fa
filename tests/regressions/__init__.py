"""Each test is a program that once trained wrongly, stalled or crashed."""
