"""Ask a running server (`make up`) about a picture with the official client: `python examples/openai_client.py FILE`"""

import base64
import sys
from pathlib import Path

from openai import APIConnectionError, APIStatusError, OpenAI

URL = "http://127.0.0.1:8000/v1"


def ask(picture: Path) -> None:
    """Print the answer as it comes."""
    data_url = f"data:image/{picture.suffix[1:]};base64,{base64.b64encode(picture.read_bytes()).decode()}"
    client = OpenAI(base_url=URL, api_key="none")
    stream = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[
            {
                "role": "user",
                "content": [
                    {"type": "image_url", "image_url": {"url": data_url}},
                    {"type": "text", "text": "What is in the picture?"},
                ],
            }
        ],
        temperature=0,
        stream=True,
    )
    for chunk in stream:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/openai_client.py FILE")
    try:
        ask(Path(sys.argv[1]))
    except APIConnectionError:
        sys.exit(f"error: no server answers at {URL}; start one with `make up`")
    except APIStatusError as error:
        sys.exit(f"error: the server says: {error.message}")
    except OSError as error:
        sys.exit(f"error: {error.filename} cannot be read: {error.strerror}")
