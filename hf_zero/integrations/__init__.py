"""What knows accelerate, transformers and PEFT; the engine below imports none of them."""
