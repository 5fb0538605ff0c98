"""What a service needs while it runs, such as a database, is opened by its lifespan; handlers ask for it by type."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec

import iris


class Stock(msgspec.Struct):
    item: str
    pieces: int


class Database:
    def __init__(self, path: str) -> None:
        self.connection = sqlite3.connect(path)
        self.connection.execute("CREATE TABLE stock (item TEXT PRIMARY KEY, pieces INT)")

    def add(self, stock: Stock) -> int:
        with self.connection:
            (pieces,) = self.connection.execute(
                "INSERT INTO stock VALUES (?, ?) ON CONFLICT DO UPDATE SET pieces = pieces + excluded.pieces"
                " RETURNING pieces",
                (stock.item, stock.pieces),
            ).fetchone()
        return int(pieces)


@asynccontextmanager
async def lifespan(client: iris.Client) -> AsyncIterator[Database]:
    database = Database(":memory:")
    print("the database is open")
    yield database  # the service joins now; what follows runs when it has left
    database.connection.close()
    print("the database is closed")


service = iris.Service("stock", lifespan=lifespan)


@service.on_request
def deliver(stock: Stock, database: Database) -> int:
    return database.add(stock)


async def main() -> None:
    async with iris.connect(embedded=True) as client, client.serve(service):
        for pieces in (3, 4):
            print(await client.request("stock", Stock("lamp", pieces), timeout=1.0))


asyncio.run(main())
