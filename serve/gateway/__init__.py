"""The gateway: any agent can talk to a policy over HTTP, and the exact tokens of the policy are recorded."""
