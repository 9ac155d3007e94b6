"""Where a request's id is kept while it is answered."""

SCOPE_KEY = "moed_request_id"
