"""Everything that knows accelerate, transformers and PEFT; the engine imports none of them."""
