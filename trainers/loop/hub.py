"""Upload of an exported folder to the Hugging Face Hub."""

from pathlib import Path

from ...engine.errors import ConfigError


def check_push(repo: str) -> None:
    """Check before training that the model can be pushed afterwards.

    Raises:
        ConfigError: The name is not a valid repository name, or no user is logged in.
    """
    from huggingface_hub import get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo)
    except HFValidationError as e:
        raise ConfigError(f"trainer.push_to_hub={repo} is not a valid repository name: {e}") from e
    # Only that there is a token: whether the Hub accepts it is not known before the upload.
    if get_token() is None:
        raise ConfigError(
            f"trainer.push_to_hub={repo} needs a token for the Hub, and there is none; log in with `hf auth login`, set "
            "HF_TOKEN, or unset it"
        )


def push(folder: Path, repo: str) -> str:
    """Upload a folder and return its address. If the repository does not exist, it is created as private. Called by one process.

    Args:
        folder: The folder to upload.
        repo: The repository, as `name` or `organization/name`.

    Raises:
        ConfigError: The upload failed. The folder is kept.
    """

    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        api = HfApi()
        repository = api.create_repo(repo, private=True, exist_ok=True)
        api.upload_folder(repo_id=repository.repo_id, folder_path=folder, commit_message="Trained with Drivetrain")
    except (HfHubHTTPError, OSError) as e:
        raise ConfigError(
            f"trainer.push_to_hub={repo}: {folder} was exported, but could not be uploaded: {e}; upload the folder yourself, for example with `hf upload {repo} {folder}`"
        ) from e
    return str(repository)
