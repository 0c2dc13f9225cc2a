"""The trainers on a fixed dataset: SFT, DPO and reward models."""
