"""The gateway: agents of any making talk to a policy by HTTP, and the policy's own tokens are kept."""
