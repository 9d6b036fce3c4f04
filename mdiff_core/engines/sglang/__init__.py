"""SGLang-diffusion as the rollout engine: a server in processes of its own, spoken to over HTTP."""
