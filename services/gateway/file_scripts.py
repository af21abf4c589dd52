"""What Redis does to uploaded files in one step each, so that the bytes of one owner are counted right whoever asks.

An owner's account is a sorted set of `size:id`, scored by when the file expires, and the sum of its sizes. What has
expired, or was evicted to make room for something else, is given back when the next file comes.

    diptych:file-account:{owner}   sorted set of the owner's files with their sizes
    diptych:file-bytes:{owner}     their sum, so that it need not be made for every file
"""

from __future__ import annotations

from typing import Final

ACCOUNT_PREFIX: Final = "diptych:file-account:"
BYTES_PREFIX: Final = "diptych:file-bytes:"

# KEYS: file, owner's files, account, bytes[, name]
# ARGV: id, info, data, size, expires_at, quota (0: none), life of an owner's keys in s, prefix of files
# Gives whether it is kept, and how many bytes the owner has then.
KEEP: Final = """
local file, owned, account, bytes, name = unpack(KEYS)
local id, info, data, size, expires_at, quota, life, prefix = unpack(ARGV)
local now = redis.call('TIME')[1]
size, quota = tonumber(size), tonumber(quota)

local function size_of(entry)
  return tonumber(string.match(entry, '^%d+'))
end

local used = tonumber(redis.call('GET', bytes))
if used == nil or redis.call('EXISTS', account) == 0 then  -- either may be evicted alone
  used = 0
  for _, entry in ipairs(redis.call('ZRANGE', account, 0, -1)) do
    used = used + size_of(entry)
  end
end

local function give_back(entry)
  redis.call('ZREM', account, entry)
  used = used - size_of(entry)
end

for _, entry in ipairs(redis.call('ZRANGEBYSCORE', account, '-inf', now)) do
  give_back(entry)
end
if quota > 0 and used + size > quota then  -- a thousand of them, for it holds up Redis: others follow at other files
  for _, entry in ipairs(redis.call('ZRANDMEMBER', account, 1000)) do
    if redis.call('HEXISTS', prefix .. string.match(entry, ':(.*)$'), 'data') == 0 then
      give_back(entry)
    end
  end
end

local fits = quota == 0 or used + size <= quota
if fits then
  redis.call('HSET', file, 'info', info, 'data', data)
  redis.call('EXPIREAT', file, expires_at)
  redis.call('ZREMRANGEBYSCORE', owned, '-inf', now)
  redis.call('ZADD', owned, expires_at, id)
  redis.call('EXPIRE', owned, life)
  if name then
    redis.call('SET', name, id, 'EXAT', expires_at)
  end
  redis.call('ZADD', account, expires_at, size .. ':' .. id)
  used = used + size
end
redis.call('SET', bytes, used, 'EX', life)
redis.call('EXPIRE', account, life)
return {fits and 1 or 0, used}
"""

# KEYS: file, owner's files, account, bytes
# ARGV: id, size, expires_at
FORGET: Final = """
local file, owned, account, bytes = unpack(KEYS)
local id, size, expires_at = unpack(ARGV)
redis.call('HSET', file, 'gone', '1')
redis.call('HDEL', file, 'info', 'data')
redis.call('EXPIREAT', file, expires_at)
redis.call('ZREM', owned, id)
if redis.call('ZREM', account, size .. ':' .. id) == 1 and redis.call('EXISTS', bytes) == 1 then
  redis.call('DECRBY', bytes, size)
end
return 1
"""
