"""What tests share: process groups, engines on tiny models, runs of trainers."""
