"""What a policy acts in: environments, and the processes that run them."""
