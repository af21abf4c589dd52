// Conversations, kept in this browser: IndexedDB holds pictures as the files they are. Without it (a private window,
// a full disk) they last as long as the page.
//
// A chat is { id, title, changedAt, messages }; a message is { role, text, pictures } and, if it is an answer,
// { model, usage, finish, error, isStopped }.

const MAX_CHATS = 200;
const MAX_BYTES = 300e6; // of pictures; the oldest conversations make room

export class ChatStore {
  static async open() {
    const store = new ChatStore();
    try {
      store.database = await request(indexedDB.open("diptych", 1), (opening) => {
        opening.onupgradeneeded = () => opening.result.createObjectStore("chats", { keyPath: "id" });
      });
      for (const chat of await request(store.#table("readonly").getAll())) store.chats.set(chat.id, chat);
    } catch {
      store.database = null;
    }
    return store;
  }

  chats = new Map();
  database = null;

  get isLasting() { return this.database !== null; }

  /** The latest first. */
  list() { return [...this.chats.values()].sort((a, b) => b.changedAt - a.changedAt); }

  async save(chat) {
    chat.changedAt = Date.now();
    this.chats.set(chat.id, chat);
    await this.#write((table) => table.put(chat));
    await this.#makeRoom();
  }

  async delete(id) {
    this.chats.delete(id);
    await this.#write((table) => table.delete(id));
  }

  async clear() {
    this.chats.clear();
    await this.#write((table) => table.clear());
  }

  async #makeRoom() {
    let bytes = 0;
    for (const [index, chat] of this.list().entries()) {
      bytes += sizeOf(chat);
      if (index > 0 && (index >= MAX_CHATS || bytes > MAX_BYTES)) await this.delete(chat.id);
    }
  }

  #table(mode) { return this.database.transaction("chats", mode).objectStore("chats"); }

  async #write(change) {
    if (!this.database) return;
    try {
      await request(change(this.#table("readwrite")));
    } catch {
      this.database = null; // a full disk: what is on the page goes on
    }
  }
}

export function newChat() {
  return { id: crypto.randomUUID?.() ?? `${Date.now()}-${Math.random()}`, title: "", changedAt: 0, messages: [] };
}

function sizeOf(chat) {
  return chat.messages.flatMap((message) => message.pictures ?? []).reduce((sum, { blob }) => sum + blob.size, 0);
}

function request(asked, prepare = () => {}) {
  return new Promise((resolve, reject) => {
    prepare(asked);
    asked.onsuccess = () => resolve(asked.result);
    asked.onerror = () => reject(asked.error);
  });
}
