// What changes from one look to the next: rates out of totals, and the last minute of each figure.

const KEPT = 120;

export class Series {
  constructor() { this.values = []; }

  add(value) {
    this.values.push(value);
    if (this.values.length > KEPT) this.values.shift();
  }

  get last() { return this.values.at(-1); }
}

/** Rates of totals that only grow, each under a name; a total that falls began anew. */
export class Rates {
  constructor() { this.seen = new Map(); }

  /** Per second since the last look at this name; null at the first. */
  of(name, total, at) {
    const before = this.seen.get(name);
    this.seen.set(name, { total, at });
    if (!before || at <= before.at || total < before.total) return null;
    return (total - before.total) / (at - before.at);
  }
}

/** A rate that does not jump: the mean of its last few values. */
export class Smooth {
  constructor(length = 6) { this.length = length; this.values = []; }

  add(value) {
    if (value === null) return this.mean;
    this.values.push(value);
    if (this.values.length > this.length) this.values.shift();
    return this.mean;
  }

  get mean() {
    return this.values.length ? this.values.reduce((sum, value) => sum + value, 0) / this.values.length : 0;
  }
}
