"""Draw docs/chat.png: the chat page's two views side by side, as a browser shows them.

python tests/support/screenshot.py docs/chat.png
"""

import io
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from PIL import Image
from support.browser import ChatWindow, PageServer, chromium
from support.paths import EXAMPLES, TINY

WIDTH, HEIGHT = 800, 880


def main(path):
    server = PageServer(TINY)
    try:
        with chromium() as browser:
            # The first answer takes longer, as it compiles kernels and imports modules. The second is drawn.
            for _ in range(2):
                window = ChatWindow(browser, server.address, WIDTH, HEIGHT)
                window.ask("What is in the picture?", EXAMPLES / "pictures" / "three_shapes.png")
                window.wait_for_answer()
            window.page.mouse.move(0, 0)
            views = [window.page.screenshot()]
            window.page.get_by_role("tab", name="Experts").click()
            window.wait_for_text("#table", "triangle")
            # Waiting for an idle network would not end, as the page polls.
            for image in window.page.locator("#overlay img, #load img").all():
                image.evaluate("image => image.decode()")
            views.append(window.page.screenshot())
    finally:
        server.close()
    joined = Image.new("RGB", (2 * WIDTH, HEIGHT), "white")
    for index, view in enumerate(views):
        joined.paste(Image.open(io.BytesIO(view)), (index * WIDTH, 0))
    joined.quantize(128).save(path, optimize=True)


if __name__ == "__main__":
    main(sys.argv[1])
