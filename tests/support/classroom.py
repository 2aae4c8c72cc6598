"""The classroom page, opened in a browser that watches it."""


class WatchedPage:
    """A page with a record of its requests, errors and console messages."""

    def __init__(self, browser, file, **options):
        self.context = browser.new_context(**{"viewport": {"width": 1200, "height": 900}, **options})
        self.page = self.context.new_page()
        self.requests, self.errors = [], []
        self.context.on("request", lambda request: self.requests.append(request.url))
        self.page.on("console", lambda message: self.errors.append(message.text))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("dialog", lambda dialog: self.errors.append(dialog.message))
        self.address = file.as_uri()
        self.page.goto(self.address)
        assert self.page.evaluate("window.vitrail !== undefined")

    def close(self):
        """Check that only the file itself was loaded and nothing failed."""
        self.context.close()
        assert [url for url in self.requests if not url.startswith("data:,")] == [self.address]
        assert self.errors == []
