"""An exported folder to the Hugging Face Hub, when a run asks for it."""

from pathlib import Path

from ..engine.errors import ConfigError
from ..engine.parallel.topology import Topology


def check_push(repo: str) -> None:
    """Refuse, before anything is trained, what could not be pushed.

    Raises:
        ConfigError: no name of a repository, or nobody is logged in.
    """
    from huggingface_hub import get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo)
    except HFValidationError as e:
        raise ConfigError(f"trainer.push_to_hub={repo} is no name of a repository: {e}") from e
    if get_token() is None:
        raise ConfigError(
            f"trainer.push_to_hub={repo} without a token of the Hub; log in with `hf auth login`, set HF_TOKEN, or unset it"
        )


def push(topology: Topology, folder: Path, repo: str) -> str:
    """Upload a folder; its address. The repository is made, private, where there is none. Collective.

    Args:
        topology: of the engine.
        folder: to upload.
        repo: `name` or `organisation/name`.

    Raises:
        ConfigError: the Hub refused it; the folder stays.
    """
    address = ""
    with topology.collective_errors():
        if topology.is_main:
            from huggingface_hub import HfApi
            from huggingface_hub.errors import HfHubHTTPError

            try:
                api = HfApi()
                repository = api.create_repo(repo, private=True, exist_ok=True)
                api.upload_folder(repo_id=repository.repo_id, folder_path=folder, commit_message="Trained with Drivetrain")
                address = str(repository)
            except (HfHubHTTPError, OSError) as e:
                raise ConfigError(f"trainer.push_to_hub={repo}: {folder} is exported, but was not uploaded: {e}") from e
    return str(topology.all_gather_object(address)[0])
