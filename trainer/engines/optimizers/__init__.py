"""Optimizers that training engines share: AdamW by the names of ``trainer.optimizer``, and settings of a step."""
